"""GradCache for modules that contain streamed models: each chunk's forward is suspended at the call of such a model."""
