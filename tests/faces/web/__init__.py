"""The console, as browsers and programs see it."""
