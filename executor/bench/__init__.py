"""The speed of the embedded engines beside what a user would write without them (`make bench-executor`)."""
