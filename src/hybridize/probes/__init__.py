"""What the parts of a hybrid do: ablations, layer by layer, by distance, against controls; and a verdict."""
