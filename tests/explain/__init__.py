"""What is explained about one VM."""
