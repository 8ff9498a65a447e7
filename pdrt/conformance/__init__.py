"""Whether a deployment answers as OpenAI's client expects, and two deployments alike."""
