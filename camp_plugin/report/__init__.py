"""What people look at: tables, plots, the episode viewer."""
