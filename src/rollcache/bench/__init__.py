"""Comparing, ablating and profiling: paired rollouts of the street world, their results and their report.

`takes` fixes what is driven, `lanes` runs variants of one rollout chunk by chunk in turns, `compare` turns the lanes
into numbers, `results` keeps them in one JSON file, `report` makes the page a person looks at.
"""
