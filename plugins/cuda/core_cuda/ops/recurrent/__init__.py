"""Steps of recurrent layers on states in slots, one launch each."""
