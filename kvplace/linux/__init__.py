"""What kvplace reads of a Linux host."""
