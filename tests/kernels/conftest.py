"""Lets the tests of this folder import its callers: test files are loaded one by one, not as a package."""

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parent))
