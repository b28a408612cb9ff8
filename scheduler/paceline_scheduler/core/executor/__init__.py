"""One executor as the scheduler sees it: the only code that changes its rows and blocks."""
