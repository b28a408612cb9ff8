"""Words that nearly every vocabulary has as one token behind a space: what prompts as text are made of."""

_TEXT = """
the of and to in a is that for it as was with be by on not he his but at are this have from or had an they which
one you were all her she there would their we him been has when who will no more if out so up said what its about
than into them can only other time new some could these two may first then do any like my now over such our man me
even most made after also did many off before must well back through years where much your way down should because
long each just state those people too little good world still see own men work here life both get under never day
same another know while last might great old year come since against right three
"""
WORDS: tuple[str, ...] = tuple(_TEXT.split())
