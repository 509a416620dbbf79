"""Speculative decoding: draft a few tokens cheaply, verify them all in one step. Built in chapter 18."""
