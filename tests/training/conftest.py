"""Run folders made on the spot for the tests that read them."""

from run_folders import make_run as make_run
