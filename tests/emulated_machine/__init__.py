"""The behaviour of kvplace on machines of other shapes and kernels, booted under emulation."""
