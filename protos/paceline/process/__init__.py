"""What every process of Paceline has, whatever it serves: its log, health, ports, signals, and how it ends.

It knows no plan, no request and no model. Nothing is imported here: a program takes each module when it needs it,
since the first ones are needed before anything heavy may be imported.
"""
