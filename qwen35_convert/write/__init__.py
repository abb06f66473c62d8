"""Writing aside: sinks, journal, receipt."""
