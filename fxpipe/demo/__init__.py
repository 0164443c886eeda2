"""The demonstration: two models trained on scikit-learn's digits, as pipelines and as they are, side by side."""
