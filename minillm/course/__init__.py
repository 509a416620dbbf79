"""A lecturer's course made from this book: set up, release, collect, grade, give feedback, export.

Every command of `minillm course` calls one module of this room.
"""
