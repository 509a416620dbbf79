"""The service: OpenAI's API over HTTP, on one engine thread. Built in chapter 23."""
