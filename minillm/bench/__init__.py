"""Workloads and measurements: what `minillm bench` runs, and the results the chapters plot. Built in chapter 00."""
