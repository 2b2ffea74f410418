"""Finding passages for queries: encoders, indices and the retriever that agents call."""
