"""Kernels: what runs close to the machine, each beside a plain PyTorch twin. Built in chapter 10."""
