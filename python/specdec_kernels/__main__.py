"""`python -m specdec_kernels` is `specdec`."""

import sys

from .cli import main

sys.exit(main())
