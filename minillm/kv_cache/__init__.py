"""Keys and values of the past, kept so that no position is computed twice. Built in chapter 03."""
