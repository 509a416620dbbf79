"""The engine: from prompts to finished texts. Built in chapter 04."""
