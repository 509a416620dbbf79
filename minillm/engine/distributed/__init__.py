"""An engine whose steps are computed by worker processes. Built in chapter 20."""
