"""The promises of kvplace, each with a test that breaks when it is broken."""
