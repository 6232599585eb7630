"""What every test may count on."""

import signal

# Run in the background of a shell the tests ignore SIGINT, and would hand that down to what they interrupt.
signal.signal(signal.SIGINT, signal.default_int_handler)
