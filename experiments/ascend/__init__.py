"""What must fit together before an experiment runs on Ascend NPUs, and two experiments for such machines."""
