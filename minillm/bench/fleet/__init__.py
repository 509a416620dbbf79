"""A fleet on the virtual clock: at full size, beside the real scheduler, beside the papers. Built in chapter 22."""
