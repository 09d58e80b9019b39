"""The question ``retrieval``: a contrastive batch that does not fit, trained three ways."""
