"""A headless Chromium for tests of pages, driven through its DevTools protocol."""
