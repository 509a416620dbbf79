"""One model on many devices: tensor, pipeline, sequence and expert parallel. Built in chapter 20."""
