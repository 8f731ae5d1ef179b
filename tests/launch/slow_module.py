"""Takes long to import."""

import time

time.sleep(30)
