"""`python -m flashrt_ros.cli` is `flashrt`."""

import sys

from .main import main

sys.exit(main())
