DROP INDEX reviews_by_decision;
DROP TABLE reviews;
INSERT INTO alembic_version VALUES ('0011');
