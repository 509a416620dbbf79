"""Speculative decoding: guess a few tokens cheaply, check them all in one step. Built in chapter 18."""
