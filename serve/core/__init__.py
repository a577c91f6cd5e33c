"""From a job to its tokens, in no protocol's words: admission, preparation, the engine's thread, each one's end."""
