"""What is right: criteria, references and bounds."""
