"""Many replicas of one model behind one server: the fleet. Built in chapter 22."""
