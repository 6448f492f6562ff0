"""Conversion: the stages that train a student, and the pipeline that runs a recipe's steps."""
