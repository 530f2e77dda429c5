"""Reports on results: tables, plots and example translations, as HTML and Markdown."""
