"""RabbitMQ over a wire of our own: connections, a publisher that knows what was stored, a consumer that resumes."""
