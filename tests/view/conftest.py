"""Run folders made on the spot for the tests of views."""

from run_folders import make_run as make_run
