"""`minillm bench server`: what HTTP costs, and this server beside others on the same weights. Built in chapter 24."""
