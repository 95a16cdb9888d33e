"""What a release consists of, made from this checkout, every file with its digest."""
