"""Generated run folders for the view tests."""

from run_folders import make_run as make_run
