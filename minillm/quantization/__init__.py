"""Quantization: weights in fewer bits, how they are chosen, and the products with them. Built in chapter 15."""
