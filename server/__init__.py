"""HTTP and text: the OpenAI API, prompts, streams, the command line. Knows no tensor."""
