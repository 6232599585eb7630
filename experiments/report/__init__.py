"""Reports: pictures and a page from traces alone. Simulated and real runs look alike."""
