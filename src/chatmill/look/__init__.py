"""Looking at data: previews, statistics, the report and the viewer. Nothing here changes a dataset."""
