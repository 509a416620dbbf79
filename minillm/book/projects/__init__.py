"""The projects of chapter 25: a harness, a baseline and a leaderboard that count work and read no clock.
Built in chapter 25."""
