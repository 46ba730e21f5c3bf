"""The hooks of a capture on its models: attached, followed when modules move, removed."""
