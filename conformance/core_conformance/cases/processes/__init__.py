"""Cases on two processes of one job, whose collectives go through captured graphs."""
